"""Single environments as one batched environment, in this process or in worker processes.

`vector`: the common part, and `SerialEnvs` in this process. `process_envs`: `ProcessEnvs`, with the processes of
`pool`. `worker`: the main function of such a process. `slot`: one environment. `shared_memory`: all arrays.
"""
