"""Packaging: one distribution, one top-level name. training/ and inference/ become subpackages of hybrid_rlhf.

They stand at the top of the checkout because people open them first; in site-packages such common names would collide
with other people's, so package_dir maps them under hybrid_rlhf (hybrid_rlhf/__init__.py does the same for a checkout).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
AT_THE_TOP = ("training", "inference")
REPO_URL, SITE_URL = (os.environ.get(name, "").rstrip("/") for name in ("REPO_URL", "SITE_URL"))  # as for `make site`

# torch and transformers reach back to what accelerator images ship today; the other lower bounds are the releases that
# this was written with. Upper bounds stand where private parts are used (core/compat.py) and rise when the tests pass
# with newer ones (`make test-newest`). `make test-oldest` has the lowest, `make test` what constraints.txt pins.
RUNTIME = [
    "torch>=2.11",
    "transformers>=5.17,<5.25",
    "deepspeed>=0.19.8,<0.20",
    "peft>=0.21.2,<0.22",
    "accelerate>=1.15",
    "datasets>=4.3",  # Unsloth wants < 5; tried with 4.3, 4.8 and 5.2 (TRL, for the tests, wants 4.7)
    "safetensors>=0.8",
    "tokenizers>=0.23",
    "numpy>=2.0",
    "jinja2>=3.1",
    "rich>=15.0",
    "pyyaml>=6.0.3",
    "ninja>=1.13",
    "websocket-client>=1.8",  # builtin:openenv
    "matplotlib>=3.11",  # the report's curves
    "fastapi>=0.165", "uvicorn>=0.54", "httpx>=0.28", "psutil>=7.0",  # server and studio: small beside torch
]
EXTRAS = {
    "vision": ["pillow>=12.0"],  # images; torchvision that fits torch is used where it is there
    "quantize": ["bitsandbytes>=0.50.2"],
    "report": ["tensorboard>=2.21"],
    "serve": [],  # all of it is installed anyway: the name stays for older commands
    "gguf": ["gguf>=0.19"],
    "gym": ["reasoning-gym>=0.1.25"],
    "math": ["math-verify>=0.9", "antlr4-python3-runtime==4.13.2"],  # builtin:math_match
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.7", "mkdocstrings[python]>=1.0", "mike>=2.1"],  # make site
    "fuzz": ["atheris>=3.0"],  # make fuzz; has no wheels for every Python
    "mutation": ["mutmut==3.8.*"],  # make mutation; tests/mutation/run.py reaches into it
}
EXTRAS["test"] = [
    "pytest>=9.0", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.170", "ruff>=0.17", "mypy>=2.4",
    "trl==1.16.*",  # the oracle of the first-step losses
    "vaderSentiment>=3.3.2",  # an example's judge, never a reward
    *EXTRAS["docs"],  # tests/project/test_site.py builds the site
    'triton>=3.6; platform_system == "Linux"',  # its interpreter runs the CUDA kernels; CUDA builds of torch bring it
    "setuptools>=77", "wheel>=0.45",  # the packaging tests build without network
    "nbclient>=0.11", "nbformat>=5.11", "ipykernel>=7.4",  # run the example notebook
    "selenium>=4.51",  # drives Chromium, where that is installed, over the server's page
    *EXTRAS["quantize"], *EXTRAS["report"], *EXTRAS["gguf"], *EXTRAS["math"], *EXTRAS["vision"],
]


def version() -> str:
    """The version string, read and not imported: torch need not be there when a package is built."""
    text = (HERE / "hybrid_rlhf" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


def at_the_tag(path: str, kind: str = "blob") -> str:
    """Where REPO_URL, a GitHub repository's address, shows a file of this version; `raw` is the file itself."""
    return f"{REPO_URL}/{kind}/v{version()}/{path}"


def readme() -> str:
    """README.md; PyPI has no other file of ours, so with REPO_URL its links lead to the repository."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not REPO_URL:
        return text
    return re.sub(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)",
                  lambda link: f"{link[1]}{link[2]}({at_the_tag(link[3], 'raw' if link[1] else 'blob')})", text)


def packages() -> list[str]:
    """The library's packages and those of training/ and inference/, under the name they are imported by."""
    folders = [folder for folder in AT_THE_TOP if (HERE / folder / "__init__.py").exists()]
    inner = [f"{folder}.{name}" for folder in folders for name in find_packages(str(HERE / folder))]
    library = find_packages(str(HERE), include=["hybrid_rlhf", "hybrid_rlhf.*"])
    return library + [f"hybrid_rlhf.{name}" for name in (*folders, *inner)]


setup(
    name="hybrid-rlhf",
    version=version(),
    description="Supervised fine-tuning, reward modelling and PPO on one machine, around one hybrid engine",
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls={**({"Documentation": SITE_URL} if SITE_URL else {}),
                  **({"Source": REPO_URL, "Changelog": at_the_tag("CHANGELOG.md")} if REPO_URL else {})},
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["rlhf", "ppo", "grpo", "dpo", "sft", "reward model", "fine-tuning", "language models"],
    python_requires=">=3.11",
    packages=packages(),
    package_dir={f"hybrid_rlhf.{folder}": folder for folder in AT_THE_TOP},
    package_data={"": [f"**/*.{kind}" for kind in ("typed", "yaml", "yml", "cpp", "h", "jinja", "html", "css", "js")]},
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hybrid-rlhf = hybrid_rlhf.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Programming Language :: C++",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
