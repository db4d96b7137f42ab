"""What a run leaves behind to be read: its log, line by line, and the page drawn from it.

- `log`: `record`, with which callbacks hand in what they found, and `RunLog`, the file that keeps it.
"""

from lightning_videoscale.report.log import LOG_NAME, RunLog, record

__all__ = ["LOG_NAME", "RunLog", "record"]
