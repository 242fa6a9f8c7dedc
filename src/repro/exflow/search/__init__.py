"""Our placement search: `portfolio.py` decides what is tried; `chain.py` is exact where it can be, `anneal.py` and
`resplit.py` improve, `balance.py` keeps the limit on load. `problem.py` says what the arrays are. `joint.py` is a search
of its own, for experts with copies and the share of tokens that each copy gets."""
