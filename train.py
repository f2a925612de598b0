#!/usr/bin/env python
"""The single launcher: python train.py --stage sft|reward|ppo|all|... [--config FILE.yaml] [--dotted.key value ...]"""

import sys

from hybrid_rlhf.cli import main

if __name__ == "__main__":
    sys.exit(main())
