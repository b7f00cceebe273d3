"""`subquad plan`: which method runs in which layer at which length, for an error of the final output that is accepted.

loads.py     what is run: inputs of one length, and how far an output is from the exact one
subject.py   what is planned: a text model at a length, or any module
grid.py      which methods are tried at a length
effort.py    how much is measured in the time that there is
measure.py   times and errors of layers, losses of single layers, and of all layers at once
choice.py    the cheapest choice under a loss, and the bound that a verification gives
planning_results.py  what is found for a subject
planner.py   the stages of planning: which losses, what they prove, choices and their verification
length.py    a text model at one length, in jobs that resume, within a time limit (measure/deadline.py)
planning.py  all lengths, and the plan that comes of them, which hf/plans.py writes and loads
arguments.py checks and marks of what the user gives
run.py       from what the user gives to a plan: the command, and `sq.plan` on transformers models
report.py    the record of it, for the report
"""
