import pytest

from megarl.config import ConfigError
from megarl.rollout import server_args


def test_fields_of_the_installed_sglang() -> None:
    assert {"attention_backend", "max_total_tokens", "weight_version", "sleep_on_idle"} <= server_args.known_fields()
    server_args.check({"attention_backend": "triton", "log_level": "info"})


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        ("atention_backend", "not a field of SGLang's ServerArgs; did you mean attention_backend?"),
        ("tp_size", "cannot be set; it is decided by rollout.tp"),
    ],
)
def test_wrong_keys(key: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.sglang.{key} .*".replace(".", r"\.", 2)) as caught:
        server_args.check({key: "x"})
    assert complaint in str(caught.value)


def test_how_sglang_is_told_to_draft() -> None:
    assert server_args.speculative(0) == {}
    told = server_args.speculative(3)
    assert (told["speculative_num_steps"], told["speculative_num_draft_tokens"]) == (3, 4)
    assert told.keys() <= server_args.known_fields()
    for key in told:
        with pytest.raises(ConfigError, match="decided by rollout.draft_tokens"):
            server_args.check({key: told[key]})
