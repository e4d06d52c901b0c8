"""An executor without a model: the plan protocol with real bookkeeping, modelled times, and tokens known in advance."""
