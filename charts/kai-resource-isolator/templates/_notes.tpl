{{- /* What NOTES warns of, a line each. `lookup` answers nothing without a cluster: then only the values are judged. */ -}}
{{- define "isolator.warnings" -}}
{{- include "isolator.warnUnused" . -}}
{{- include "isolator.warnPolicy" . -}}
{{- if .Values.notes.lookAround -}}
{{- include "isolator.warnNamespace" . -}}
{{- include "isolator.warnKai" . -}}
{{- include "isolator.warnNodes" . -}}
{{- include "isolator.warnHami" . -}}
{{- end -}}
{{- end -}}

{{- define "isolator.warnUnused" -}}
{{- if ne .Values.paths.hostInstallBase "/usr/local" }}
- paths.hostInstallBase does nothing; the one path is paths.containerVgpuMount ({{ .Values.paths.containerVgpuMount }}).
{{- end }}
{{- with .Values.webhook.gpuShareResources }}
- webhook.gpuShareResources does nothing; the pod's annotations decide.
{{- end }}
{{- with .Values.tls.patch }}
- tls.patch does nothing; the webhook makes its own certificate, without a Job (or tls.certManager, tls.existingSecret).
{{- end }}
{{- if or .Values.webhook.image .Values.librarySync.image }}
- webhook.image and librarySync.image do nothing; every workload runs image.* ({{ include "isolator.image" . }}).
{{- end }}
{{- if contains "projecthami/" .Values.image.repository }}
- image.repository is {{ .Values.image.repository }}: this chart needs an image built from this project, which has the command `isolator`.
{{- end }}
{{- end -}}

{{- define "isolator.warnPolicy" -}}
{{- $policy := .Values.webhook.admissionPolicy -}}
{{- $denies := and $policy.enabled (has "Deny" $policy.validationActions) -}}
{{- if and (eq .Values.webhook.failurePolicy "Ignore") (not $denies) }}
- webhook.failurePolicy is Ignore: while the webhook is away, pods start without a quota; webhook.admissionPolicy.enabled=true refuses them.
{{- end }}
{{- if and $policy.enabled (not $denies) }}
- webhook.admissionPolicy only warns or audits: sharing pods without a quota still start.
{{- end }}
{{- if eq .Values.webhook.onNoLimit "release" }}
- webhook.onNoLimit is release: a pod to which KAI gives no limit runs without a quota.
{{- end }}
{{- if not (has "kai-resource-reservation" .Values.webhook.excludedNamespaces) }}
- webhook.excludedNamespaces lacks kai-resource-reservation: KAI's reservation pods must not be touched.
{{- end }}
{{- if and (not .Values.monitor.enabled) (or .Values.monitor.serviceMonitor.enabled .Values.monitor.podMonitor.enabled) }}
- monitor.serviceMonitor or monitor.podMonitor is on without monitor.enabled=true: there is nothing to scrape, and neither is rendered.
{{- end }}
{{- if and (not .Values.monitor.enabled) (or .Values.monitor.grafana.enabled .Values.monitor.prometheusRule.enabled) }}
- monitor.grafana or monitor.prometheusRule is on without monitor.enabled=true: there is nothing to show, and neither is rendered.
{{- end }}
{{- $most := toString .Values.webhook.podDisruptionBudget.maxUnavailable -}}
{{- $least := toString .Values.webhook.podDisruptionBudget.minAvailable -}}
{{- $replicas := int .Values.webhook.replicaCount -}}
{{- $all := or (eq $least "100%") (and (regexMatch "^[0-9]+$" $least) (ge (int $least) $replicas)) -}}
{{- if and (gt $replicas 1) (not (regexMatch "^[0-9]+%?$" $most)) $all }}
- webhook.podDisruptionBudget.minAvailable is {{ $least }} of {{ $replicas }} replicas: no node that runs one can be drained.
{{- end }}
{{- if and (gt $replicas 1) (regexMatch "^0+%?$" $most) }}
- webhook.podDisruptionBudget.maxUnavailable is {{ $most }}: no node that runs a replica can be drained.
{{- end }}
{{- if and .Values.monitor.serviceMonitor.enabled .Values.monitor.podMonitor.enabled }}
- Both monitor.serviceMonitor and monitor.podMonitor are on: every series is scraped twice.
{{- end }}
{{- end -}}

{{- define "isolator.warnNamespace" -}}
{{- $namespace := lookup "v1" "Namespace" "" (include "isolator.namespace" .) -}}
{{- $level := dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "" $namespace -}}
{{- if has $level (list "baseline" "restricted") }}
- Namespace {{ include "isolator.namespace" . }} enforces Pod Security level {{ $level }}, which refuses the host folders of libsync and monitor:
    kubectl label namespace {{ include "isolator.namespace" . }} pod-security.kubernetes.io/enforce=privileged --overwrite
{{- end }}
{{- end -}}

{{- define "isolator.warnKai" -}}
{{- $binder := lookup "apps/v1" "Deployment" "kai-scheduler" "binder" -}}
{{- if $binder -}}
{{- $line := "" -}}
{{- range dig "spec" "template" "spec" "containers" list $binder -}}
{{- $line = printf "%s %s %s" $line (join " " .command) (join " " .args) -}}
{{- end -}}
{{- $plugins := regexFind "--plugins[= ].*" $line | trimPrefix "--plugins" | trimPrefix "=" | trim -}}
{{- $hamicore := regexFind "\"hamicore\"\\s*:\\s*\\{[^{}]*" $plugins -}}
{{- if or (not (contains "hamicore" $plugins)) (regexMatch "\"enabled\"\\s*:\\s*false" $hamicore) }}
- KAI's binder runs without its hamicore plugin, so no pod gets a limit. KAI 0.18 and later: global.gpuSharingMode=HamiCore;
  before: global.gpuSharing=true and binder.plugins.hamicore.enabled=true.
{{- end }}
{{- end }}
{{- end -}}

{{- define "isolator.warnNodes" -}}
{{- $bytes := list -}}{{- $missing := list -}}{{- $gpu := 0 -}}
{{- $nodes := dig "items" list (lookup "v1" "Node" "" "") -}}
{{- range $nodes -}}
{{- $labels := dig "metadata" "labels" dict . -}}
{{- $memory := get $labels "nvidia.com/gpu.memory" -}}
{{- if eq (get $labels "nvidia.com/gpu.present") "true" -}}
{{- $gpu = add1 $gpu -}}
{{- if not (regexMatch "^[0-9]+$" $memory) -}}{{- $missing = append $missing .metadata.name -}}{{- end -}}
{{- end -}}
{{- if and (regexMatch "^[0-9]+$" $memory) (ge (int64 $memory) 1048576) -}}{{- $bytes = append $bytes .metadata.name -}}{{- end -}}
{{- end -}}
{{- with $missing }}
- No usable label nvidia.com/gpu.memory (MiB) on {{ len . }} GPU node(s), {{ first . }} for one: KAI cannot compute a limit there.
{{- end }}
{{- with $bytes }}
- Label nvidia.com/gpu.memory is in bytes on {{ len . }} node(s), {{ first . }} for one: KAI's limit comes out far above the card. It must be MiB.
{{- end }}
{{- if and $nodes (eq (int $gpu) 0) .Values.monitor.enabled (eq (get .Values.monitor.nodeSelector "nvidia.com/gpu.present" | toString) "true") }}
- No node carries nvidia.com/gpu.present=true, so no monitor runs. Label the GPU nodes, or change monitor.nodeSelector.
{{- end }}
{{- end -}}

{{- define "isolator.warnHami" -}}
{{- range dig "items" list (lookup "admissionregistration.k8s.io/v1" "MutatingWebhookConfiguration" "" "") -}}
{{- $configuration := .metadata.name -}}
{{- range .webhooks -}}
{{- if eq .name "vgpu.hami.io" }}
- {{ $configuration }} is the webhook of the HAMi platform, which cannot share GPU nodes with KAI: keep it off them.
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}
