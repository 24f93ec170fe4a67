"""Whom an alert is told: the log, a command of the job's, a webhook. None of them can hold up the sampling."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

from trainwright.errors import UserError
from trainwright.job.schema import AlertsSection
from trainwright.watch.alerts.active_alerts import Alert, alert_line

TIMEOUT_S: Final = 10.0
REPEAT_S: Final = 3600.0


class Delivery:
    """Tells alerts to `log`, and those that are warnings to the command and the webhook, one after the other.

    The command and the webhook hear of the same thing once an hour at most, however often it comes and goes or the run
    starts again; `earlier` are the alerts of the run so far.

    Raises:
        UserError: the webhook's variable is not set, or it holds a URL that is neither https nor on loopback.
    """

    def __init__(
        self,
        section: AlertsSection,
        log: Callable[[str], None],
        environment: Mapping[str, str],
        earlier: Iterable[Alert] = (),
    ) -> None:
        self._log = log
        self._command = section.command
        self._url = None if section.webhook_env is None else webhook_url(section.webhook_env, environment)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="alerts")
        self._sent_s: dict[tuple[str, str], float] = {}
        self._standing: set[tuple[str, str]] = set()
        for alert in earlier:
            self._is_news(alert)

    def tell(self, alert: Alert) -> None:
        """Tell one alert; the log at once, the others as soon as they can."""
        self._log(alert_line(alert))
        if alert.severity == "warning" and self._is_news(alert):
            self.send(alert)

    def _is_news(self, alert: Alert) -> bool:
        """Say whether an alert was not sent within the hour, and note that it is; one that is over, if it was sent."""
        key = alert.rule, alert.subject
        if alert.state == "cleared":
            known = key in self._standing
            self._standing.discard(key)
            return known
        if alert.time_s - self._sent_s.get(key, -REPEAT_S) < REPEAT_S:
            return False
        self._sent_s[key] = alert.time_s
        self._standing.add(key)
        return True

    def send(self, alert: Alert) -> None:
        """Tell the command and the webhook, whatever they heard before."""
        if self._command is not None:
            self._thread.submit(self._run, self._command, alert)
        if self._url is not None:
            self._thread.submit(self._post, self._url, alert)

    def close(self) -> None:
        """Let what is on its way arrive."""
        self._thread.shutdown(wait=True)

    def _run(self, command: list[str], alert: Alert) -> None:
        named = {f"TRAINWRIGHT_ALERT_{key.upper()}": str(value) for key, value in _scalars(alert).items()}
        try:
            done = subprocess.run(
                command,
                input=json.dumps(alert.to_json()),
                text=True,
                env={**os.environ, **named},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._log(f"warning: the alert command failed: {type(error).__name__}: {command[0]}")
        else:
            if done.returncode:
                self._log(f"warning: the alert command {command[0]} ended with exit code {done.returncode}")

    def _post(self, url: str, alert: Alert) -> None:
        body, headers = json.dumps(alert.to_json()).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=body, headers=headers, method="POST")
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S):
                pass
        except (OSError, urllib.error.URLError) as error:
            # Never the URL itself: its path is often the secret.
            self._log(f"warning: the webhook at {urlsplit(url).hostname} failed: {getattr(error, 'code', error)}")


def open_delivery(
    section: AlertsSection, log: Callable[[str], None], environment: Mapping[str, str], earlier: Iterable[Alert] = ()
) -> Delivery:
    """Return the delivery of a job's alerts; a webhook that cannot be used is said, and left out."""
    try:
        return Delivery(section, log, environment, earlier)
    except UserError as error:
        log(f"warning: {error.message}; alerts go to the log and the command alone")
        return Delivery(section.model_copy(update={"webhook_env": None}), log, environment, earlier)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect could lead an https webhook anywhere: it counts as a failure."""

    def redirect_request(self, *args: Any, **named: Any) -> None:
        return None


_OPENER: Final = urllib.request.build_opener(_NoRedirect)


def webhook_url(variable: str, environment: Mapping[str, str]) -> str:
    """Return the URL that an environment variable holds; UserError, which never shows it, unless it is a safe one."""
    url = environment.get(variable)
    if not url:
        raise UserError(
            f"alerts.webhook_env names {variable}, which is not set", hints=[f"export {variable}=https://…"]
        )
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return url
    if parts.scheme == "http" and _is_loopback(parts.hostname or ""):
        return url
    raise UserError(
        f"the URL in {variable} is neither https nor on this machine", hints=["use https, or http://127.0.0.1"]
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _scalars(alert: Alert) -> dict[str, str | float]:
    return {"state": alert.state, "rule": alert.rule, "subject": alert.subject, "what": alert.what}
