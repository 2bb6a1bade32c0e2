"""Start runs of a declared workflow by a job: from a schedule, an event, a Data Source, or another process."""

import inspect
from typing import Any

from celery5.protocol.job.job import derive_job_id
from celery5.runners.context import CurrentJob
from celery5.workflows.declared import DeclaredWorkflow


def make_launcher(declared: DeclaredWorkflow[..., Any], app: Any, options: dict[str, Any]) -> Any:
    """Return the task whose jobs start a run each. Its id follows from the job's, so a job that runs twice starts one.

    Args:
        options: Options of a task: `schedule`, `source`, `queue` and so on.
    """

    async def launch(job: CurrentJob, /, *args: Any, **kwargs: Any) -> str:
        run = await declared.options(id=derive_job_id("run", job.id)).astart(*args, **kwargs)
        return str(run.id)

    own = inspect.Parameter("job", inspect.Parameter.POSITIONAL_ONLY, annotation=CurrentJob)
    parameters = [own, *declared.parameters.signature.parameters.values()]
    vars(launch)["__signature__"] = inspect.Signature(parameters)
    annotations = dict(declared.function.__annotations__)
    launch.__annotations__ = {
        name: annotation
        for name, annotation in annotations.items()
        if name in declared.parameters.signature.parameters
    }
    launch.__doc__ = declared.function.__doc__
    launch.__module__, launch.__qualname__ = declared.function.__module__, declared.function.__qualname__
    launch.__name__ = declared.function.__name__
    return app.task(bind=True, name=declared.name, **options)(launch)
