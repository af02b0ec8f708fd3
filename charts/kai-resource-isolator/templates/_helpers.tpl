{{- /* Names. C3 of KAI's installer waits for <release>-webhook, so the release name is the prefix. */ -}}
{{- define "isolator.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 53 | trimSuffix "-" -}}
{{- end -}}

{{- define "isolator.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "isolator.secret" -}}
{{- default (printf "%s-webhook-tls" (include "isolator.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}

{{- /* builtin | certManager | existing */ -}}
{{- define "isolator.tlsMode" -}}
{{- if .Values.tls.certManager.enabled -}}certManager
{{- else if .Values.tls.existingSecret -}}existing
{{- else -}}builtin
{{- end -}}
{{- end -}}

{{- /* "true" where the webhook sets caBundle itself and therefore needs the API. */ -}}
{{- define "isolator.setsCaBundle" -}}
{{- if not .Values.tls.caBundle -}}true{{- end -}}
{{- end -}}

{{- /* The rest take (dict "root" $ "component" "webhook|libsync|monitor|..."). */ -}}
{{- define "isolator.component" -}}
{{- get (dict "webhook" "kai-webhook" "libsync" "kai-libsync" "monitor" "kai-vgpu-monitor") .component | default (printf "kai-%s" .component) -}}
{{- end -}}

{{- define "isolator.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ include "isolator.component" . }}
{{- end -}}

{{- define "isolator.labels" -}}
{{ include "isolator.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- /* The same with "values" (the component's): what pods carry. Our own pods never wait for our own webhook. */ -}}
{{- define "isolator.podLabels" -}}
{{- $ours := include "isolator.labels" . | fromYaml -}}
{{- $_ := set $ours "kai-resource-isolator.io/webhook" "ignore" -}}
{{- toYaml (mergeOverwrite (deepCopy .values.podLabels) $ours) -}}
{{- end -}}

{{- define "isolator.serviceAccount" -}}
{{- default (printf "%s-%s" (include "isolator.fullname" .root) .component) .values.serviceAccount.name -}}
{{- end -}}

{{- define "isolator.serviceAccountObject" -}}
{{- if .values.serviceAccount.create }}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "isolator.serviceAccount" . | quote }}
  namespace: {{ include "isolator.namespace" .root | quote }}
  labels:
    {{- include "isolator.labels" . | nindent 4 }}
  {{- with .values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- end -}}

{{- define "isolator.image" -}}
{{- $registry := .Values.global.imageRegistry | default .Values.image.registry | default "" | trimSuffix "/" -}}
{{- $image := .Values.image.repository -}}
{{- if $registry -}}{{- $image = printf "%s/%s" $registry $image -}}{{- end -}}
{{- $image = printf "%s:%s" $image (.Values.image.tag | default .Chart.AppVersion) -}}
{{- if .Values.image.digest -}}{{- $image = printf "%s@%s" $image .Values.image.digest -}}{{- end -}}
{{- $image -}}
{{- end -}}

{{- define "isolator.imagePullSecrets" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "string" . }}{{ . | quote }}{{ else }}{{ .name | quote }}{{ end }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* A map with the user's keys over ours; null takes one out. (dict "ours" "<yaml>" "theirs" map) */ -}}
{{- define "isolator.over" -}}
{{- $result := .ours | fromYaml -}}
{{- range $key, $value := .theirs -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $result $key -}}{{- else -}}{{- $_ := set $result $key $value -}}{{- end -}}
{{- end -}}
{{- toYaml $result -}}
{{- end -}}

{{- define "isolator.nonRoot" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "isolator.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Where a pod goes. */ -}}
{{- define "isolator.placement" -}}
nodeSelector:
  {{- include "isolator.over" (dict "ours" "kubernetes.io/os: linux" "theirs" .values.nodeSelector) | nindent 2 }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end -}}

{{- /* The one path, as a volume of the pods of this chart. */ -}}
{{- define "isolator.vgpuVolume" -}}
- name: vgpu
  hostPath:
    path: {{ .Values.paths.containerVgpuMount }}
    type: DirectoryOrCreate
{{- end -}}

{{- /* What may not be paths.containerVgpuMount; below a tree nothing may. isolator/mountpath.py has the same lists. */ -}}
{{- define "isolator.systemFolders" -}}
/bin /boot /home /lib /lib32 /lib64 /libx32 /media /mnt /opt /root /sbin /srv /tmp /usr /usr/bin /usr/include /usr/lib /usr/lib32 /usr/lib64 /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /lib/x86_64-linux-gnu /lib/aarch64-linux-gnu /usr/libexec /usr/libx32 /usr/local /usr/local/bin /usr/local/etc /usr/local/lib /usr/local/lib64 /usr/local/sbin /usr/local/share /usr/sbin /usr/share /var /var/cache /var/lib /var/lib/containerd /var/lib/kubelet /var/log /var/tmp
{{- end -}}

{{- define "isolator.systemTrees" -}}
/dev /etc /proc /run /sys /var/run
{{- end -}}

{{- /* Judged here and not by the schema, whose errors show a pattern and no advice. */ -}}
{{- define "isolator.checkMount" -}}
{{- $path := .Values.paths.containerVgpuMount -}}
{{- $advice := "give a folder of its own, like /usr/local/vgpu" -}}
{{- if or (not (regexMatch "^(/[A-Za-z0-9._@+-]+)+$" $path)) (regexMatch "/\\.{1,2}(/|$)" $path) -}}
{{- fail (printf "paths.containerVgpuMount: %q is not an absolute, clean path of letters, digits and ._@+- (no '..', '//', final '/' or white space): %s" $path $advice) -}}
{{- end -}}
{{- if eq $path "/etc" -}}
{{- fail (printf "paths.containerVgpuMount: %q is a system folder: its ld.so.preload would act on every program of the nodes; %s" $path $advice) -}}
{{- end -}}
{{- $trees := include "isolator.systemTrees" . | splitList " " -}}
{{- if or (has $path (include "isolator.systemFolders" . | splitList " ")) (has $path $trees) -}}
{{- fail (printf "paths.containerVgpuMount: %q is a system folder: %s" $path $advice) -}}
{{- end -}}
{{- range $trees -}}
{{- if hasPrefix (printf "%s/" .) $path -}}
{{- fail (printf "paths.containerVgpuMount: %q is below the system folder %s: %s" $path . $advice) -}}
{{- end -}}
{{- end -}}
{{- if not (regexMatch "^/[^/]+/" $path) -}}
{{- fail (printf "paths.containerVgpuMount: %q lies directly below /: %s" $path $advice) -}}
{{- end -}}
{{- end -}}

{{- define "isolator.checks" -}}
{{- include "isolator.checkMount" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "isolator.fullname" .)) -}}
{{- fail (printf "%q names Services, which takes a letter first and no dots: choose another release name or set fullnameOverride" (include "isolator.fullname" .)) -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled .Values.tls.existingSecret -}}
{{- fail "tls.certManager.enabled and tls.existingSecret: choose one" -}}
{{- end -}}
{{- if and .Values.tls.caBundle (not .Values.tls.existingSecret) -}}
{{- fail "tls.caBundle belongs to tls.existingSecret: set that too, or leave both out" -}}
{{- end -}}
{{- if and .Values.tls.caBundle (not (contains "-----BEGIN CERTIFICATE-----" .Values.tls.caBundle)) -}}
{{- fail "tls.caBundle must be PEM (-----BEGIN CERTIFICATE-----), not base64 of it" -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if lt (include "isolator.seconds" $tls.builtin.caDuration | int64) (include "isolator.seconds" $tls.builtin.duration | int64) -}}
{{- fail (printf "tls.builtin.caDuration (%s) is shorter than tls.builtin.duration (%s)" $tls.builtin.caDuration $tls.builtin.duration) -}}
{{- end -}}
{{- if lt (include "isolator.seconds" $tls.builtin.duration | int64) 120 -}}
{{- fail (printf "tls.builtin.duration (%s) must be 2m or more" $tls.builtin.duration) -}}
{{- end -}}
{{- if le (include "isolator.seconds" $tls.certManager.duration | int64) (include "isolator.seconds" $tls.certManager.renewBefore | int64) -}}
{{- fail (printf "tls.certManager.renewBefore (%s) must be shorter than tls.certManager.duration (%s)" $tls.certManager.renewBefore $tls.certManager.duration) -}}
{{- end -}}
{{- if and .Values.webhook.topologySpread.enabled (lt (int .Values.webhook.topologySpread.maxSkew) 1) -}}
{{- fail "webhook.topologySpread.maxSkew must be 1 or more" -}}
{{- end -}}
{{- end -}}
