"One-layer transformers by their names: routers, FFNs, events, and models whose answer is known."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
