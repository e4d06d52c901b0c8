"""A thousand executors for a day: many schedulers behind a router, in a coarse model of each executor.

`bank` advances all executors at once, in columns: a step or a run of equal steps of each in one numpy operation, by
the same step costs as `cadenza_simulator.run`, which remains the fine model: the core itself, step by step. `routers`
choose the scheduler of a request as the field's routers do, `placement` the executor within it as the scheduler does,
`caches` says what of a prompt is cached there, `failures` when executors fail; `sources` has the traffic, from a
public trace or drawn from published statistics. `engine` is the loop, `results` what comes of it.
"""
