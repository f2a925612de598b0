"""A run: the loop, what it writes, what it leaves behind. Takes any trainer with step(); never imports one."""
