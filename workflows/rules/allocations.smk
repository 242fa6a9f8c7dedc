# Points as Slurm jobs: each job takes several of them, and starts the ranks of one after the other with srun.
from repro.slurm import driver

ALLOCATIONS = {allocation["name"]: allocation for allocation in SLURM["allocations"]}


def of(key):
    """Resource function: something of the allocation."""
    return lambda wildcards: ALLOCATIONS[wildcards.allocation][key]


rule allocation:
    output:
        "results/{run}/slurm/done/{allocation}.json",
    log:
        "results/{run}/slurm/logs/{allocation}.log",
    conda:
        "../../environment.yml"
    resources:
        **submission(),
        # The job starts its ranks itself: with this, Snakemake's plugin puts no srun of one task around it.
        mpi="srun",
        nodes=of("nodes"),
        tasks_per_node=SLURM["tasks_per_node"],
        cpus_per_task=SLURM["settings"]["cores_per_rank"],
        runtime=of("minutes"),
    params:
        plan=PLAN_FILE,
        environment=SLURM["settings"]["environment"],
    shell:
        "set +eu; source {params.environment:q}; set -eu;"
        " repro allocation {params.plan:q} {wildcards.allocation} --out {output:q} > {log:q} 2>&1"


onstart:
    driver.start(PLAN["results"])


onsuccess:
    driver.settle(PLAN["results"])


onerror:
    driver.settle(PLAN["results"])
