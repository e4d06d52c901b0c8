"""The load-testing harness: a schedule fixed before the run, one clock for every server, results that can be rerun.

`requests` (what is asked) and `arrivals` (when) make a plan; `driver` sends it to a `target` and fills `columns`;
`metrics` sums them up; `results` is the file; `plots` and `report` are its pictures. `cadenza.simulate` fills the same
columns in virtual time.
"""
