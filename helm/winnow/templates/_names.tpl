{{- define "winnow.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "winnow.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "winnow.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "winnow.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Called with the root and the name of a component. */}}
{{- define "winnow.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "winnow.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "winnow.labels" -}}
{{- $root := index . 0 -}}
{{ include "winnow.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{/* The component whose pods have the service in them. */}}
{{- define "winnow.serving" -}}
{{- if eq .Values.topology "gateway" }}gateway{{ else }}runtime{{ end }}
{{- end }}

{{- define "winnow.secret" -}}
{{- .Values.auth.existingSecret | default (include "winnow.fullname" .) }}
{{- end }}

{{- define "winnow.hasRedisPassword" -}}
{{- if or (eq .Values.redis.mode "bundled") .Values.redis.password .Values.auth.existingSecret }}yes{{ end }}
{{- end }}
