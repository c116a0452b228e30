"""Try a checkpoint: load it into a model and take a step, on a real or a simulated device.

To run code from a file, `run_trial` starts a process (`subprocess_call`) that restricts itself
(`sandbox/`). `run.perform` builds the model (`stage`, `model/factory`), loads the state, makes the
inputs and takes the step (`step`). `findings` turns the outcome into findings. A device that this
machine lacks is simulated by `stage_fake` or, for scripts, by `simulation/`.
"""
