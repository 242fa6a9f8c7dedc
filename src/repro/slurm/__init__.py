"""The DAG's points as Slurm jobs.

Read `packing` (which points share a job, and what that costs), then `allocation` (a job runs its points, each as a step of srun), then
`causes` and `journal` (why a job ended before its points did), `driver` (what the one who submits does about it); `queue` asks Slurm.
"""
