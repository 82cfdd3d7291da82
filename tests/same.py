"""Two stores hold the same runs, to the bit."""
import torch

def assert_same_runs(a, b, names, seeds, manifests=False):
    "Weights and history of every run; with `manifests` those too, but for the clock."
    for c in names:
        for s in seeds:
            x, y = a.load(c, s), b.load(c, s)
            assert x.history.equals(y.history) and x.weights.keys() == y.weights.keys()
            for rule, p in x.weights.items():
                assert all(torch.equal(v, y.weights[rule][n]) for n, v in p.items()), (c, s, rule)
            for m in (x.manifest, y.manifest): [m.pop(n, 0) for n in ("cpu_seconds", "began", "ended")]
            assert not manifests or x.manifest == y.manifest
