"""A run: training loop, files, checkpoints, resuming. Takes any trainer with step(); never imports one."""
