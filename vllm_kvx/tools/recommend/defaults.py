"""What a run asks and takes where its options do not say."""

# Of a request, and requests at a time.
INPUT, OUTPUT, CONCURRENCY = 32000, 1000, 16
# What is asked: lookups in prose and of several words, which tell a policy that loses half, and
# long answers, which tell of retention that waits for an answer to begin. Without a GPU a token
# takes a second, and answers are short.
TASKS, TASKS_ON_CPU = ("quick", "long_answers"), ("one_number",)
# Questions of the first round, fewer without a GPU, and at most; every round doubles what was asked
# so far.
FIRST, FIRST_ON_CPU, MOST = 16, 8, 512
# Minutes, so that ten are enough with the last round, and tokens of a step, where there is no GPU.
ON_CPU_MINUTES, STEP_ON_CPU = 9.0, 512
# The GPU that gains are counted for where none is here and none is named.
DEVICE = "h100"
# What a core of a CPU multiplies at the very most, in float32 per second: more than AVX-512 does.
CORE_FLOPS = 200e9
# Gains over full below which a policy is not worth asking for.
LEAST_GAIN = 1.01
