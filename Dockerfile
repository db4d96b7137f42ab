# docker build --tag videoscale . && docker run --gpus all --ipc host --rm videoscale
# PyPI's torch brings CUDA itself; the host needs a driver and the NVIDIA container toolkit.
FROM python:3.12-slim
# Triton compiles a launcher with a C compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /videoscale
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[diffusers,video,text,peft,cli,tensorboard]"
WORKDIR /workspace
CMD ["videoscale", "doctor"]
