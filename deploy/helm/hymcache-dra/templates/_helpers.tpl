{{- define "hymcache-dra.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "hymcache-dra.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "hymcache-dra.name" . }}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "hymcache-dra.labels" -}}
{{ include "hymcache-dra.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "hymcache-dra.selector" -}}
app.kubernetes.io/name: {{ include "hymcache-dra.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hymcache-dra.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "hymcache-dra.controllerAccount" -}}
{{ include "hymcache-dra.fullname" . }}-controller
{{- end }}

{{- define "hymcache-dra.kubeletPluginAccount" -}}
{{ include "hymcache-dra.fullname" . }}-kubeletplugin
{{- end }}

{{- /* The Secret with the agents' user name and password; empty where there is none. */ -}}
{{- define "hymcache-dra.agentCredentials" -}}
{{- if .Values.hostAgent.credentialsSecretName }}
{{- .Values.hostAgent.credentialsSecretName }}
{{- else if .Values.hostAgent.enabled }}
{{- include "hymcache-dra.fullname" . }}-hostagent-credentials
{{- end }}
{{- end }}

{{- /* The Secret with the agents' certificate; empty where there is none. */ -}}
{{- define "hymcache-dra.agentTls" -}}
{{- if .Values.hostAgent.tls.secretName }}
{{- .Values.hostAgent.tls.secretName }}
{{- else if .Values.hostAgent.enabled }}
{{- include "hymcache-dra.fullname" . }}-hostagent-tls
{{- end }}
{{- end }}

{{- /* Changes when pods have to read the agents' Secrets anew. */ -}}
{{- define "hymcache-dra.agentChecksum" -}}
{{- $agent := .Values.hostAgent }}
{{- list $agent.credentialsSecretName $agent.tls.secretName (sortAlpha $agent.tls.nodeNames) | toJson | sha256sum }}
{{- end }}

{{- define "hymcache-dra.fabricUrl" -}}
{{- if .Values.simulator.enabled -}}
http://{{ include "hymcache-dra.fullname" . }}-simulator.{{ .Release.Namespace }}.svc:8080
{{- else -}}
{{ trimSuffix "/" .Values.fabricManager.url }}
{{- end }}
{{- end }}

{{- define "hymcache-dra.podBasics" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "hymcache-dra.unprivileged" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "hymcache-dra.unprivilegedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}
