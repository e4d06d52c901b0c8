"""Serving in virtual time: the services' own scheduler core, executors that are cost models, and no sleeping.

`kinds` says what an executor costs and holds (`published` has some, `fit` makes others from `recordings`); `traffic` is
what comes when; `run` lets both happen; `capacity` asks how much traffic so many executors hold within an SLO. What
comes out are the load-testing harness's columns, so that its metrics, files, plots and reports apply.
"""
