"""`toolrl cold-start`: a cold start by itself, without engines or a replay buffer; leaves traces and a model to train from."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from toolrl import tasks
from toolrl.app.cold_start import ColdStartReport, check_cold_start, cold_start
from toolrl.app.model_folder import prepare_model
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.errors import UserError


def run_cold_start(config: RunConfig) -> tuple[Path, ColdStartReport]:
    """Writes the traces and trains on them; returns the folder of the trained model (Hugging Face format) and the report.

    The model is trained further with `toolrl train PRESET model.path=FOLDER cold_start.steps=0`; the traces lie beside it and
    serve another run as `cold_start.traces_path`.

    Raises:
        UserError: `cold_start.steps` is 0, or no traces can be had.
    """
    if config.cold_start.steps < 1:
        raise UserError("cold_start.steps is 0: nothing would be trained; set it above 0, e.g. cold_start.steps=300")
    check_cold_start(config, tasks.build(config.tasks, config.seed))
    prepare_model(config)  # first: a model that is not there leaves no run behind
    folder = RunFolder.create(config)
    with View(config, folder) as view:
        report = asyncio.run(_run(config, folder, view))
    return folder.cold_start / "model", report


async def _run(config: RunConfig, folder: RunFolder, view: View) -> ColdStartReport:
    import ray

    from actors.learner_group import LearnerGroup
    from toolrl import placement
    from toolrl.app.parts import sandbox_hosts
    from toolrl.app.ray_start import start_ray

    view.stage("starting Ray and the learner")
    start_ray(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ray.shutdown)
        on_gpu = placement.resolve_device(config, ray.cluster_resources()) == "cuda"
        await stack.enter_async_context(sandbox_hosts(config))
        learner = await LearnerGroup.start(config, str(folder.model), on_gpu=on_gpu)
        stack.push_async_callback(learner.stop)
        report = await cold_start(config, folder, learner, view)
        await learner.export(str(folder.cold_start / "model"))
    return report
