"""The tasks by name."""

from __future__ import annotations

from winnow_evaluation.tasks import niah, records, variable_tracking, word_extraction
from winnow_evaluation.tasks.sample import Task

TASKS: dict[str, Task] = {
    task.name: task for module in (niah, variable_tracking, word_extraction, records) for task in module.TASKS
}
