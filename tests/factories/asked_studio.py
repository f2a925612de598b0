"""As a program: a studio of its own that is asked everything about a new run; what it has loaded then, as JSON.

Its arguments: the outputs, and a folder with base, a model, and sft.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(outputs: str, place: str) -> None:
    from starlette.testclient import TestClient

    from hybrid_rlhf.studio.studio import Studio
    from hybrid_rlhf.studio.studio_app import make_app, open_parts

    studio, token = Studio(Path(outputs).resolve()), "t" * 32
    routes, closers = open_parts(studio)
    settings = {"model.model_name_or_path": f"{place}/base", "data.sources": [f"{place}/sft.jsonl"]}
    with TestClient(make_app(studio, routes, token, 8090, closers), base_url="http://127.0.0.1:8090") as client:
        client.get("/", params={"token": token})
        status = {"goals": client.get("/api/goals").status_code,
                  "options": client.get("/api/options", params={"stage": "sft"}).status_code}
        for kind, more in (("settings", {}), ("data", {"path": f"{place}/sft.jsonl"}), ("preview", {}), ("plan", {})):
            answer = client.post(f"/api/{kind}", json={"stage": "sft", "settings": settings, **more})
            status[kind] = answer.status_code
    loaded = sorted({name.partition(".")[0] for name in sys.modules})
    print(json.dumps({"status": status, "loaded": loaded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
