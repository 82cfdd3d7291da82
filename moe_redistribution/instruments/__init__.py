"What is measured in a model: ablation, patching, probes, routing and others."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
