"""A stand-in for a GPU: tensors that say they are on `cuda`, live on the CPU, and tell on whoever mixes devices or
waits.

What it finds is what a GPU would refuse (an operation on tensors of two devices) and what would make the host wait for
one (reading a value, copying between devices, shapes that depend on values). Kernels and their rounding are the
CPU's."""
from collections import Counter
from contextlib import ExitStack
import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA = torch.device("cuda")
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "unique", "repeat_interleave.Tensor",
         "is_nonzero", "equal")                              # the host needs the value, or the shape depends on it
CROSS = ("copy_", "_to_copy", "index_put", "_index_put", "index.Tensor")             # may take both devices, but wait
VIEWS = ("view", "_unsafe_view", "expand", "select.int", "slice.Tensor", "transpose", "t.default",
         "permute", "unsqueeze", "squeeze", "split", "unbind", "detach", "alias", "as_strided", "diagonal",
         "_reshape_alias", "lift")  # no kernel is launched

class Away(torch.Tensor):
    "A tensor on the stand-in. To autograd it is on `meta`, which every build of torch knows."
    @staticmethod
    def __new__(cls, inner):
        new = torch.Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(),
                                                  storage_offset=inner.storage_offset(), dtype=inner.dtype,
                                                  device="meta", requires_grad=inner.requires_grad)
        new.inner = inner
        return new

    is_cuda = property(lambda self: True)
    device = property(lambda self: CUDA)

    def __repr__(self): return f"Away({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, *_): raise RuntimeError(f"{func}: a tensor of the stand-in left its `with`")

def is_cuda(device): return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
def inside(x): return tree_map_only(Away, lambda t: t.inner, x)
def outside(x): return tree_map_only(torch.Tensor, Away, x)

class Running(TorchDispatchMode):
    "Runs every operation on the CPU and tells `log` about those on the stand-in."
    def __init__(self, log): super().__init__(); self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), str(func).removeprefix("aten.")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        here = [t for t in tensors if not isinstance(t, Away) and t.dim()]
        made = str(kwargs.get("device")) in ("meta", "cuda")               # by autograd for a gradient, or by `Placing`
        if not made and not any(isinstance(t, Away) for t in tensors): return func(*args, **kwargs)
        if here and not name.startswith(CROSS):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda and cpu, in {name}")
        # a search for what is true
        masks = name.startswith("index") and any(t.dtype == torch.bool for t in tensors[1:])
        sent = (name == "copy_.default" and getattr(args[1], "is_pinned_here", False)
                and (*args, kwargs.get("non_blocking"))[2])
        if here and not sent or masks or name.startswith(WAITS): self.log.waited(name)
        if not name.startswith(VIEWS): self.log.kernels[name] += 1
        assert not any(t.is_meta
                       for t in tensors if not isinstance(t, Away)), f"{name}: values lost on their way to the stand-in"
        if made: kwargs["device"] = "cpu"
        return outside(func(*inside(args), **inside(kwargs)))

class Placing(TorchFunctionMode):
    "Moves tensors between the CPU and the stand-in, where torch itself would ask for a driver."
    def __init__(self, log): super().__init__(); self.log = log

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "pin_memory": return pinned(args[0])
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Away):
            args = args[0], positions(args[1]), *args[2:]
        if name in ("to", "cpu", "cuda", "tolist", "numpy", "item"): return self.move(func, name, *args, **kwargs)
        if is_cuda(kwargs.get("device")) and name in ("tensor", "as_tensor"):
            if isinstance(args[0], Away): return args[0]
            self.log.waited(name)
            return Away(func(*args, **kwargs | {"device": "cpu"}))
        if is_cuda(kwargs.get("device")): kwargs = kwargs | {"device": "meta"}           # `Running` takes it from there
        return func(*args, **kwargs)

    def move(self, func, name, x, *args, **kwargs):
        places = [d for d in (*args, *kwargs.values()) if isinstance(d, (str, torch.device))]
        away, there = (isinstance(x, Away),
                       name == "cuda" or name == "to" and (is_cuda(places[0]) if places else isinstance(x, Away)))
        if away and not there:
            self.log.waited(name)
            return x.inner.clone() if name in ("to", "cpu") else func(x.inner, *args, **kwargs)
        if there and not away:
            if not (kwargs.get("non_blocking") and getattr(x, "is_pinned_here", False)): self.log.waited(name)
            return Away(x.clone())
        if name in ("cpu", "cuda"): return x
        return func(x, *(a for a in args if a not in places), **{k: v for k, v in kwargs.items() if k != "device"})

def positions(index):
    "An index whose lists are tensors on the CPU, as torch makes them."
    each = index if isinstance(index, tuple) else (index,)
    return tuple(torch.tensor(i) if isinstance(i, list) else i for i in each)

def pinned(x):
    x = x.clone()
    x.is_pinned_here = True
    return x

class Standin:
    """Within it `device='cuda'` is the stand-in; `kernels` counts launches by name, `waits` where in the package the
    host waited."""
    def __init__(self): self.kernels, self.waits, self.stack = Counter(), Counter(), ExitStack()

    def __enter__(self):
        for mode in (Running(self), Placing(self)): self.stack.enter_context(mode)
        return self

    def __exit__(self, *error): self.stack.close()

    def clear(self): self.kernels.clear(), self.waits.clear()

    def waited(self, what):
        ours = [f for f in traceback.extract_stack() if "/moe_redistribution/" in f.filename]
        self.waits[f"{ours[-1].name}: {ours[-1].line}" if ours else what] += 1
