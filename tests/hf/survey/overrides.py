"""What no rule gives: by model type, the class that stands for it and fields of its small config."""

from typing import Any

CLASSES: dict[str, str] = {}

RESNET: dict[str, Any] = {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 24, 32, 40], "depths": [1] * 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"]}

CONFIGS: dict[str, dict[str, Any]] = {}
