"""Serving in virtual time: the services' own scheduler core, executors that are cost models, and no sleeping.

`executor_profiles` defines an executor's costs and limits (`published` has some, `fit` makes others from `recordings`);
`traffic` produces the requests; `run` is the event loop; `capacity` searches for the rate that a number of executors
holds within an SLO. The results are the load-testing harness's columns, so its metrics, files, plots and reports apply.
"""
