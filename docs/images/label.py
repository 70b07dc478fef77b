"""The picture of `dubito label` in docs/active-learning.md: a headless Chromium labels digits by their published labels.

python docs/images/label.py          # needs chromium on the path
"""

import base64
import sys
import tempfile
import threading
import time
from pathlib import Path

from dubito.evaluation.problems import problem
from dubito.labelling import Server, Session, task

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from browser import Browser

LABELS, PICTURE = 60, Path(__file__).with_name("label.png")


def main() -> None:
    truth = problem("digits").split(0).y_train.tolist()
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        session = Session(task("digits"), folder, batch=10)
        server = Server(session)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        session.start()
        browser.ask("Emulation.setDeviceMetricsOverride", width=1280, height=880, deviceScaleFactor=1, mobile=False)
        browser.ask("Page.navigate", url=server.address)
        while len(session.journal.standing) < LABELS:
            if not session.queue or session.busy:  # patient, so that the curve has many points
                time.sleep(0.05)
                continue
            index = session.queue[0]
            session.answer(index, truth[index])
        while session.busy or not browser.run("!!document.querySelector('#input img')?.complete"):
            time.sleep(0.1)
        browser.run("document.querySelector('#guess').click()")
        time.sleep(2)  # until the page has asked for the last state
        picture = browser.ask("Page.captureScreenshot", format="png")["data"]
        PICTURE.write_bytes(base64.b64decode(picture))
        server.shutdown()
        server.server_close()
        session.close()


if __name__ == "__main__":
    main()
