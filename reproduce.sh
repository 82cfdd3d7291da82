#!/bin/sh
# Sets up .venv once, trains Table 1 at one of the paper's seeds, prints it beside the paper's and writes rows to out/.
# All five seeds: SEEDS=42,137,256,512,1024 ./reproduce.sh
exec make -C "$(dirname "$0")" ARGS="--seeds ${SEEDS:-42}" reproduce
