"""Small models that several files ask: untrained ones of a condition, and tiny ones of transformers."""
import torch

from moe_redistribution.opened.families import tiny_model
from moe_redistribution.models.population import init

def untrained(name, seeds=(0, 1)):
    "The initial weights of a condition, one member a seed."
    return init(name, [torch.Generator().manual_seed(s) for s in seeds])

def eager_model(family="olmoe", dtype=torch.float64, **sizes):
    "In double precision, with the library's own loop over experts and eager attention: its faster ways are single."
    model = tiny_model(family, dtype=dtype, **sizes)
    model.set_experts_implementation("eager"), model.set_attn_implementation("eager")
    return model
