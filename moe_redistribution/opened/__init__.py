"Mixtures of others, opened: the same sites, edits and measures as in a model of ours."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
