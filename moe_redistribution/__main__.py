"`python -m moe_redistribution` is the console script `moe-redistribution`."
import sys

from .record.entry import enter

if __name__ == "__main__": sys.exit(enter())
