"""`sq.compare` and `sq.plan_module`: any PyTorch module, inputs for it, and a function of its output.

attention.py  where methods go: `sq.hf.swap`, `sq.nn.swap` or `sq.intercept`
unchanged.py  the module is afterwards what it was before
compare.py    every method in the module: fidelity, speed, memory
comparison.py the result of that
plan.py       a method for each layer: the planner of tools/plan, with a module as its subject
planned.py    the result of that
tables.py     both results as text and as Markdown
"""
