"Five papers and questions of our own: arms, what is asked of them, pages."
from moe_redistribution import imported_late

__getattr__, __dir__ = imported_late(__name__, __path__)
