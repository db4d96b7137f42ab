"""Does a split network compute what it computes whole? Its first calls are run once more and looked at.

`plan_verification`   all exchanges of a call, or all its values beside those of the whole sequence
`exchange_watch`      whether ranks come to the same exchanges, and attention to all of them
`token_mixing`        calls that mix the tokens of a slice
`trial_run`           one more run without a trace
`attention_changes`   whether attention is still what was looked at
"""
