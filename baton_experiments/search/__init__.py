"""Which placement to run: a search over prefill and decode counts, tensor parallel degrees and colocated alternatives.

candidate    a placement with tensor parallel degrees, its name, and all that fit a budget of GPUs
rates        the highest rate that keeps a promise, by bisection; attainment between the rates that were run
study        what all runs of one search have in common: profiles, work, SLO, engine settings
run          one set-up at one rate on the simulated cluster, and what came out
phases       prefill and decode simulated apart, put together again
baselines    DistServe's two placement algorithms
jobs         runs in this process or in several
planner      the search: phases apart, the best few confirmed by joint simulation
replay       what a recorded log would have had from each candidate
recorded     logs as workloads: trace files, the router's own log lines, an experiment's records
fronts       Pareto fronts
plot         their picture
emit         the winner as cluster.yaml
"""
