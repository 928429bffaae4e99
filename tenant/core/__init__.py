"""The trust core: the tenant's code on which privacy and integrity depend.

It has no socket, thread or clock, and decides nothing about retries: code that does can delay a product or make it
fail, but cannot weaken a promise. Read it in the order in which a product meets its checks; the first to fail ends it:

    pads        a row index is burnt before its pad exists, and belongs to this process and secret
    masked      a pad masks once; only `MaskedRows` leave; the gate: no attribution is under way, the executor is not
                in quarantine, and no holder of a pad's seed is of its company (rule 8)
    parts       rows are finite before they are masked; an answer is opened for its own rows, and every row is checked
    verifier    the check of a row over the integers, before the product is used for anything
    blame       after a refused product: whose result was wrong, before the next request leaves

Rules are numbered as in `docs/threat-model.md`. Public facts of a layer group are in
`symbiosis_priv.checkpoints.manifest`; `tenant.preparation` makes the keys and stores them.

The promises, and the tests that would refute them (`tests/tenant/core/` unless another place is named):

* **Rows leave only as `MaskedRows`, which only `masked` makes.** A connection refuses a raw tensor, mypy refuses the
  call, and no other module of the tenant uses a connection or the named exception `UNMASKED_BY_CHOICE`.
  Refuted by `test_masked.py::test_a_connection_refuses_a_raw_tensor`,
  `::test_a_tensor_handed_past_the_masking_code_is_found`, `::test_no_other_code_can_hand_a_tensor_to_a_connection`.
* **A mask row is used once.** Its index is burnt before the pad exists, a pad masks once, and pads cover every row.
  `test_masked.py::test_a_pad_used_twice_is_an_error`, `::test_every_row_gets_a_mask_row_of_its_own`,
  `test_rules.py::test_rule_3_a_row_is_used_once`, `threat_model.planted.reused_pads`.
* **Masks come from a fresh secret, in one process.** `test_secret.py`, and rules 1, 2 and 12 in `test_rules.py`.
* **No company sees a row and a seed of its pad.** `test_masked.py::test_routing_cannot_overrule_the_gate`,
  `tests/tenant/session/test_schedules.py::test_rule_8_holds_over_random_schedules`,
  `threat_model.planted.blind_to_companies`.
* **Every answer is checked before it is used.** A wrong product passes with probability 2^-60 at most (2^-59 for the
  dense product of a stack of experts, and in a narrow ring), for every error.
  `test_rules.py::test_rule_6_no_lie_is_used`, `test_verifier.py::test_a_wrong_entry_never_passes`,
  `tests/symbiosis_priv/arithmetic/test_wraps.py`.
* **A wrong result is attributed before the next request leaves, and no honest provider is convicted for damage
  to the tenant's own weights.** `tests/tenant/session/test_session.py::test_only_liars_are_named`,
  `::test_damage_to_the_tenants_own_weights_convicts_no_honest_provider`.
"""
