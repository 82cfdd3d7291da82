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

class Adapted(torch.nn.Module):
    "A linear layer with a low-rank adapter beside it, as LoRA hangs one: its `weight` is not all that it does."
    def __init__(self, base, size):
        super().__init__()
        self.base, g = base, torch.Generator().manual_seed(0)
        self.A, self.B = (size * torch.randn(*s, generator=g).to(base.weight) for s in ((2, base.in_features),
                                                                                        (base.out_features, 2)))
    weight, bias = property(lambda self: self.base.weight), property(lambda self: self.base.bias)
    def forward(self, x): return self.base(x) + x @ self.A.T @ self.B.T
