"""Overrides typed in a shell, which reach Hydra as they were meant, or the error says how to type them."""

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString

from kdist.cli.compose import as_hydra_reads, shell_argument
from kdist.errors import ConfigError


def value_of(override: str) -> object:
    """The value that Hydra makes of an override; of a sweep, the list of its values."""
    value = OverridesParser.create().parse_override(override).value()
    if isinstance(value, ChoiceSweep):
        return [item.text if isinstance(item, QuotedString) else item for item in value.list]
    return value


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.dir=ein lauf ü", "ein lauf ü"),
        ("run.dir=s3://bucket/läufe/1", "s3://bucket/läufe/1"),
        ("run.dir=日本", "日本"),
        ("run.dir=Zoë's", "Zoë's"),
        ("data.path=ü\\ö\\", "ü\\ö\\"),
        ("run.dir='ein lauf ü'", "ein lauf ü"),
        ("run.name=ü, ä b", ["ü", "ä b"]),
        ("+x=[a, ü b]", ["a", "ü b"]),
        ("+x={_target_: f, path: ö/ä.npz}", {"_target_": "f", "path": "ö/ä.npz"}),
    ],
)
def test_a_value_with_any_letters_is_read_as_typed(override: str, value: object) -> None:
    (read,) = as_hydra_reads([override])
    assert value_of(read) == value


@pytest.mark.parametrize(
    "override", ["train.steps=5", "+x=[a,b]", "lr=choice(1,2)", "~hooks.stop", "data.path=a b", "x="]
)
def test_what_hydra_reads_stays_as_it_is(override: str) -> None:
    assert as_hydra_reads(["-m", override, "--config-dir", "ü"]) == ["-m", override, "--config-dir", "ü"]


@pytest.mark.parametrize("override", ["run.dir=lauf (2)", "run.dir=Anna's", "run.dir=a=b", 'run.dir=the "a\'s"'])
def test_an_error_says_how_to_quote_what_can_be_read_in_several_ways(override: str) -> None:
    with pytest.raises(ConfigError, match="quotes within those of the shell: ") as caught:
        as_hydra_reads([override])
    (in_shell,) = shlex.split(str(caught.value).partition("the shell: ")[2])
    assert value_of(in_shell) == override.partition("=")[2]


@pytest.mark.parametrize("value", ["runs/mine", "runs/units=[64,32]", "a\\b", "$HOME's", 'say "a"', "s3://b/a b"])
def test_what_is_to_be_typed_again_is_read_as_it_is_meant(value: str) -> None:
    (in_shell,) = shlex.split(shell_argument("run.dir", value))
    assert value_of(in_shell) == value


def test_a_recipe_needs_no_plus() -> None:
    assert as_hydra_reads(["recipe=mnist", "cluster=2ps2w"]) == ["+recipe=mnist", "cluster=2ps2w"]
    assert as_hydra_reads(["-m", "recipe=mnist,linear"]) == ["-m", "+recipe=mnist,linear"]
    # Where it is one of the defaults, it is no addition.
    assert as_hydra_reads(["--config-name=theirs", "recipe=mnist"]) == ["--config-name=theirs", "recipe=mnist"]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (["+recipe=mnist", "+hooks=mlflow"], ["+recipe=mnist", "+hooks@hooks=[mlflow]"]),
        # A recipe may choose other hooks, which it must not do afterwards.
        (["+hooks=mlflow", "recipe=mnist"], ["+recipe=mnist", "+hooks@hooks=[mlflow]"]),
        (["+hooks=mlflow", "+hooks=wandb", "-m"], ["+hooks@hooks=[mlflow,wandb]", "-m"]),
        (["hooks=progressive", "+hooks=[mlflow,wandb]"], ["hooks=[progressive,mlflow,wandb]"]),
    ],
)
def test_a_plus_adds_to_the_hooks(arguments: list[str], read: list[str]) -> None:
    assert as_hydra_reads(arguments) == read
