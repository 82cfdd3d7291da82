"""The two tiers of tests: `first` keeps some cases of a parametrised claim at every change and leaves the others to
`make audit`."""
import pytest

def first(some, cases):
    "Cases for `parametrize`, all of them, of which those not in `some` carry the mark `audit`."
    lost = [x for x in some if x not in (cases := list(cases))]
    assert not lost, f"not among the cases: {lost}"
    return [x if x in some else pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.audit)
            for x in cases]
