"""Any PyTorch module, inputs for it, and a function of its output: `sq.plan`, and the parts of `sq.compare`.

attention_sites.py  where methods go: `sq.hf.swap`, `sq.nn.swap` or `sq.intercept`
unchanged.py  the module is afterwards what it was before
inputs.py     the arguments that `sq.compare` and `sq.plan` have in common
plan.py       `sq.plan`: checks what kind of model it is, and plans
module_planning.py  a method for each layer: the planner of tools/plan, with a module as its subject
planned.py    the result of that
tables.py     the results as text and as Markdown
"""
