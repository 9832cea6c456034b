"""MXFP8 on a GPU, emulated and as this GPU runs it: through scripts/llama4.sh and through torchtitan's own entry.

One process sees few tokens in 20 steps, half of them warm-up in the Scout configs: the loss is asked to fall by 0.5.
"""

import os
import subprocess
import sys

import pytest

from mxfp8_titan.report.run_log import read_steps
from tests.train.harness import DEBUG, MX, ROOT, train

pytestmark = [pytest.mark.gpu, pytest.mark.train]

SCOUT = ROOT / "configs" / "llama4_scout_2layer.toml"
COMPILE = {"compiled": "--compile.enable", "eager": "--compile.no-enable"}
RECIPES = ["mxfp8_emulated_rceil", "auto"]


@pytest.mark.parametrize("compile_flag", COMPILE.values(), ids=COMPILE)
@pytest.mark.parametrize("config", [DEBUG, SCOUT], ids=["debug", "scout"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_torchtitan_s_own_entry_trains_with_the_toml_s_hooks(recipe, config, compile_flag, tmp_path):
    flags = (
        f"--mx.recipe_name={recipe}",
        "--training.steps=20",
        "--metrics.log_freq=5",
        "--debug.seed=1",
        compile_flag,
    )
    run = train(tmp_path, *MX, *flags, config=config, entry="torchtitan.train")
    assert "expert modules converted" in run.output
    assert len(run.steps) == 5
    assert run.losses()[0] - run.losses()[-1] >= 0.5


@pytest.mark.parametrize("compile_flag", COMPILE.values(), ids=COMPILE)
@pytest.mark.parametrize("config", [DEBUG, SCOUT], ids=["debug", "scout"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_llama4_sh_trains(recipe, config, compile_flag, tmp_path):
    flags = [*MX, f"--mx.recipe_name={recipe}", "--metrics.log_freq=5", "--debug.seed=1", compile_flag]
    env = {
        **os.environ, "PYTHON": sys.executable, "CONFIG_FILE": str(config), "STEPS": "20", "LOG_DIR": str(tmp_path),
        "NGPU": "1", "EXTRA_ARGS": " ".join(flags),
    }  # fmt: skip
    done = subprocess.run([ROOT / "scripts" / "llama4.sh"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.splitlines()[-2].startswith("Median Tokens/Second (excluding step 1): ")
    assert done.stdout.splitlines()[-1].startswith("Max Memory Usage: ")
    losses = [step.loss for step in read_steps(next(tmp_path.glob("*.log")))]
    assert losses[0] - losses[-1] >= 0.5
