# Points as Slurm jobs: each job takes several of them, and starts the ranks of one after the other with srun.
from repro.jobs import driver

check_jobs()


rule allocation:
    input:
        PLAN_FILE,  # newer than whatever an earlier job of these points has written
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
        nodes=of_allocation("nodes"),
        tasks_per_node=SLURM["tasks_per_node"],
        cpus_per_task=SLURM["settings"]["cores_per_rank"],
        runtime=of_allocation("minutes"),
        trial=lambda wildcards, attempt: attempt,
    params:
        environment=SLURM["settings"]["environment"],
    shell:
        "set +u; source {params.environment:q}; set -u;"
        " repro allocation {input:q} {wildcards.allocation} --trial {resources.trial} --out {output:q} > {log:q} 2>&1"


onstart:
    driver.start(PLAN["results"])


onsuccess:
    driver.settle(PLAN["results"])
    driver.release()


onerror:
    driver.settle(PLAN["results"])
    driver.release()
