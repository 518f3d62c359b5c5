"""The tasks by name."""

from __future__ import annotations

from winnow_service.evaluation.sample import Task
from winnow_service.evaluation.tasks import niah, records, variable_tracking, word_extraction

TASKS: dict[str, Task] = {
    task.name: task for module in (niah, variable_tracking, word_extraction, records) for task in module.TASKS
}
