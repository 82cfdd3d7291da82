"Small language models and the texts that they learn."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
