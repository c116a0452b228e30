"""Try a checkpoint: load it into a model and take a step, on a real or a simulated device.

How it goes: for code of a file, `trial.rehearse` starts a process (`subprocess_call`) that limits
itself (`sandbox/`). `run.perform` builds the model (`stage`, `model_factory`), loads the state,
makes inputs and takes the step (`step`). `outcome` turns what happened into findings. A device that
is not here is simulated by `stage_fake` or, for scripts, by `simulation/`.
"""
