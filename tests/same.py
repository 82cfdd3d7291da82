"""Two stores hold the same runs, to the bit."""
import torch

from moe_redistribution.training.store import Store

def assert_same_runs(a, b, names, seeds, stream="authors", manifests=False):
    "Weights and history of every run in two stores or folders; with `manifests` those too, but for the clock."
    a, b = (x if isinstance(x, Store) else Store(x) for x in (a, b))
    for c in names if isinstance(names, (list, tuple)) else [names]:
        for s in seeds:
            x, y = a.load(c, s, stream), b.load(c, s, stream)
            assert x.history.equals(y.history) and x.weights.keys() == y.weights.keys()
            for rule, p in x.weights.items():
                assert all(torch.equal(v, y.weights[rule][n]) for n, v in p.items()), (c, s, rule)
            for m in (x.manifest, y.manifest): [m.pop(n, 0) for n in ("cpu_seconds", "began", "ended")]
            assert not manifests or x.manifest == y.manifest
