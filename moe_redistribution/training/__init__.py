"Many seeds at once: engine, loop, store, jobs, executors, and what a study is."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
