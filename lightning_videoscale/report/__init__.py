"""What a run leaves behind to be read: its log, line by line, and the page drawn from it.

- `log`: `record`, with which callbacks hand in what they found, and `RunLog`, the file that keeps it.
- `records`: what `RunReport` writes into it, of the run and of all ranks' steps.
- `reading`: the log read back after whatever end.
- `comparison`: the three balances on the clips that the run saw.
- `bottlenecks`: what costs the most in some steps.
- `slowness`, `causes`: how slow a rank is by itself, and what is to blame where ranks wait for each other.
- `loading`: what the loaders did, and what was left out.
- `costs`, `findings`, `sections`, `data_sections`: from records to what is shown.
- `judge`: what to do, all advice there is.
- `charts`, `page` and `templates/`: the page.
"""

from lightning_videoscale.report.log import LOG_NAME, RunLog, record
from lightning_videoscale.report.page import REPORT_NAME, write_report

__all__ = ["LOG_NAME", "REPORT_NAME", "RunLog", "record", "write_report"]
